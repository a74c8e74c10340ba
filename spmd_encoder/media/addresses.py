"""Which network addresses are public: pure, over the special-purpose registries of IANA.

Python's own `is_global` differs between releases and calls some addresses global that lead inside, so that what is
known to be special is listed here by name, and `is_global` may only forbid more.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address

# The most telling name comes first: the first match is taken.
_SPECIAL = tuple(
    (ip_network(network), kind)
    for kind, networks in (
        # AWS, Google, Azure and others; Azure's second, Alibaba, Oracle; AWS and Google over IPv6.
        ("a cloud metadata address", ("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192")),
        ("a cloud metadata address", ("fd00:ec2::254", "fd20:ce::254")),
        ("the unspecified address", ("0.0.0.0", "::")),
        ("a loopback address", ("127.0.0.0/8", "::1")),
        ("a link-local address", ("169.254.0.0/16", "fe80::/10")),
        ("a private address", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
        ("an address of carrier-grade NAT", ("100.64.0.0/10",)),
        ("a multicast address", ("224.0.0.0/4", "ff00::/8")),
        ("a benchmark address", ("198.18.0.0/15", "2001:2::/48")),
        (
            "a documentation address",
            ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
        ),
        ("an IPv4 address inside an IPv6 one", ("::ffff:0:0/96", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48")),
        ("a 6to4 or Teredo tunnel", ("2002::/16", "2001::/32", "192.88.99.0/24")),
        ("a reserved address", ("0.0.0.0/8", "192.0.0.0/24", "240.0.0.0/4", "100::/64", "5f00::/16", "2001::/23")),
    )
    for network in networks
)
_NAT64 = IPv6Network("64:ff9b::/96")


def forbidden_kind(address: Address) -> str | None:
    """Why media are not fetched from `address` unless that is allowed ("a private address"); None where it is public.

    IPv4 addresses inside IPv6 ones are refused whatever they hold, since no resolver gives them, with one exception:
    behind NAT64 every IPv4 host has an address in 64:ff9b::/96 (RFC 6052), which is judged by what it stands for.
    """
    if isinstance(address, IPv6Address) and address in _NAT64:
        return forbidden_kind(IPv4Address(int(address) & 0xFFFFFFFF))
    for network, kind in _SPECIAL:
        if address.version == network.version and address in network:
            return kind
    return "a reserved address" if not address.is_global or address.is_reserved or address.is_multicast else None
