"""Pictures, tables and pages. Nothing outside this package and the command line imports matplotlib or rich."""
