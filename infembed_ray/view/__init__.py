"""`infembed view`: a local page that shows what a stage published."""
