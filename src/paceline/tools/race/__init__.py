"""`paceline race`: methods and peers side by side on one task and one link."""
