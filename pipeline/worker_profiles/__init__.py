"""Profiles that are shipped, one TOML file each: classes of hardware, from published figures."""
