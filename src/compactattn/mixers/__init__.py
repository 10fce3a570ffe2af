"""Mixers: what moves information along time, one file each."""
