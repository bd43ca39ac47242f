"""What the gateway tells about itself: metrics, logs, and the ids that join them."""
