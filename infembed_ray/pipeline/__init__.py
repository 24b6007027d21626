"""`infembed pipeline`: all stages from one settings file, and its export to workflow engines."""
