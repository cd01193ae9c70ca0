"""Other ways of speculating, in the same engine: what the streams are compared with."""
