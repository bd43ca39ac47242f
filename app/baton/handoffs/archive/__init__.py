"""Keep pinned and long-lived handoffs in an S3 bucket, where they outlive all machines."""
