"""What is stored to choose what a query reads."""
