"""The page of a store, and the one HTTP server: ``ckptsync web``, ``web.listen``, ``/metrics``.

The server answers JSON that is computed from one cached overview of the store; static JavaScript
modules draw the page from it, so a page costs the store one refresh for all viewers.

In reading order: `server` runs uvicorn on an address, with limits for slow clients. `app` maps URLs
to answers, checks the token and sets headers. `overview_cache` refreshes the overview while
anybody looks. `documents` makes the JSON of each URL; `html_file` writes the page as one file.
``static`` holds the page's modules.
"""
