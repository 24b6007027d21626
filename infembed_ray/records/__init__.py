"""Rows that stages exchange: their types and their readers and writers."""
