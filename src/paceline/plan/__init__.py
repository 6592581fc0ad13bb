"""What a run will take, before it is started. Plain arithmetic: nothing here imports torch."""
