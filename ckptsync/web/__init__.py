"""The page of a store, and the one HTTP server: ``ckptsync web``, ``web.listen``, ``/metrics``.

``server``: uvicorn on an address, with limits for slow clients. ``app``: URLs, the token, headers.
``latest``: one refresh of the overview for all viewers, while anybody looks. ``documents``: JSON by
URL; ``html_file``: the page as one file. ``static`` is the page.
"""
