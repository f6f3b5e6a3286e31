"""Whole training loops for people: a recipe is a YAML file, `engines train` runs it."""
