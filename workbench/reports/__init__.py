"""Reports for the user: pure functions of the ranks' replies and of what they recorded."""

from workbench.reports.json_document import as_json, schema_path

__all__ = ["as_json", "schema_path"]
