"""Stores over SSH: SFTP spoken over the pipes of the system's own `ssh`.

``connection``: URL, options, the ssh process, and why it ended.  ``protocol``: packets, requests
and their answers.  ``server_files``: sessions, and the files and directories on the server.
``draft``: temporary files, resuming, publishing.  ``store``: the contract, and the names.
"""
