"""Retrieval tasks: what is searched, what is asked, what is right. One reader a published layout."""
