"""How the documents are made: the site's links, and the figures that are drawn from code or from runs."""
