"""Build scripts of the documents: the links of the site, and the figures made from code or from runs."""
