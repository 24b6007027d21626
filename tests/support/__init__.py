"""Helpers of several test directories."""
