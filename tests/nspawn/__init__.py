"""The units under real systemd: `make nspawn`.

`machine`: a container of this system to install them in.
"""
