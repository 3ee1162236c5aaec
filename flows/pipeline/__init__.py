"""How DVC, Git and Prefect run the stages."""
