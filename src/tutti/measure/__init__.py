"""What every command that measures shares: files, units, statistics, timing, tables, terminal."""
