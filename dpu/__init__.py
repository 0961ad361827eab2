"""The card: a DPU that serves NVMe controllers over vfio-user."""
