"""Who is in the job: rendezvous, secret, membership, addresses, plan comparison, and how the job ends."""

from tensorwire.control.client import Client
from tensorwire.control.coordinator import Coordinator
from tensorwire.control.frames import Cause
from tensorwire.control.member import Member

__all__ = ["Cause", "Client", "Coordinator", "Member"]
