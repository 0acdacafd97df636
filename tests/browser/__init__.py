"""Opens a report of `pdd-simulate` in a real headless browser and looks at it: `python -m browser REPORT.html`."""
