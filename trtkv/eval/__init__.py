"""What a policy costs in quality: one file a task."""
