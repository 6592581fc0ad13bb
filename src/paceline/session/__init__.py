"""One process's side of a job: what the user handed over, the session that joins the workers, and its engines."""
