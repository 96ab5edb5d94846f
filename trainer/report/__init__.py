"""``report.html``: its page, its pictures as data, and how they are drawn."""
