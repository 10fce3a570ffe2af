"""Memories: what turns a sequence of vectors into keys and values."""
