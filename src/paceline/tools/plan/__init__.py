"""What a run will take, before it is started. It is plain arithmetic: nothing here imports torch."""
