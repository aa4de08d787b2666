from gptcli.cli.main import entry

entry()
