"""Layouts: who owns which state? One file a method, and what they share."""
