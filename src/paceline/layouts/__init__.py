"""Who owns which state, and where does it live? One file a method."""
