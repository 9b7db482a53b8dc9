"""Vidur's operators beside the roofline."""
