"""MRC (Multipath Reliable Connection), reconstructed from public readers of its specification."""
