"""Tilewise under the interfaces of others: each module is imported by itself, and needs no other."""
