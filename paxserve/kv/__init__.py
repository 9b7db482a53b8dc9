"""Host accounting of KV memory: which block belongs to whom. No KV values live here."""
