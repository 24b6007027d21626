"""The `infembed` command."""
