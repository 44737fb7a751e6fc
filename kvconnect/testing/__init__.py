"""Conformance checks and fault injection for new parts. Needs neither pytest nor an engine.

``kvconnect.testing.transport.check_transport`` runs the conformance checks of the transport seam;
``kvconnect.testing.store.check_store`` those of the stores of secondary tiers;
``kvconnect.testing.inproc.InprocTransport`` is a transport within one process;
``kvconnect.testing.proxy.FaultProxy`` spoils a TCP connection on purpose, and
``python -m kvconnect.testing.proxy`` is the same as a command.
"""
