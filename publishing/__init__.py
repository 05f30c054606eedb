"""Write model cards, check what may be uploaded, and push models to the Hub."""
