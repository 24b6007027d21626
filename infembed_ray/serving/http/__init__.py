"""The HTTP API: routes, schemas, API keys and the playground."""
