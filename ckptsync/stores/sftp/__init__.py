"""Stores over SSH: SFTP spoken over the pipes of the system's own `ssh`.

Users have configured SSH already, and no Python client keeps all of OpenSSH's rules. So OpenSSH's
client connects and encrypts, and only the file protocol is spoken here, with many requests in
flight.

Read `store` (the store contract, and names), then `draft` (temporary files, resuming, publishing),
`server_files` (sessions, and the files and directories on the server), `protocol` (packets,
requests and their answers) and `connection` (URL, options, the ssh process, and why it ended).
"""
