"""Who is in the group, and does this step count? One file a method; `rendezvous` and `board` serve them all."""
