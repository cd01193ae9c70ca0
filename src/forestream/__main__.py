from forestream.cli import app

app()
