"""Layouts of other projects, one file each: what they hold is read into `parts.Parts`, checked, and written again."""
