"""Guest images: recipe, lock file and what is put inside."""
