"""What people look at: tables and pictures made from the records of runs."""
