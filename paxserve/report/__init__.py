"""What people look at: tables and pictures made from the saved tables of runs."""
