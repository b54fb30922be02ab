"""OpenSSH's certificates: whether one vouches for a host. Public keys as SSH sends them."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import (
    SSHCertificate,
    SSHCertificateType,
    SSHCertPublicKeyTypes,
    load_ssh_public_identity,
)

from cluster.remote_text import one_line

SUFFIX = "-cert-v01@openssh.com"


def fingerprint(blob: bytes) -> str:
    """SHA256:... of a public key as SSH sends it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def key_type(blob: bytes) -> str:
    """The type that a public key itself names, such as ssh-ed25519; of what is no key, something else."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode(errors="replace")


def fits(pattern: str, name: str) -> bool:
    """Whether OpenSSH's pattern means `name`: only * and ? are special, brackets belong to [name]:port."""
    if "*" not in pattern and "?" not in pattern:
        return pattern.lower() == name.lower()
    words = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(words, name.lower(), flags=re.DOTALL) is not None


def read_certificate(blob: bytes) -> SSHCertificate | None:
    """The certificate in `blob`; None when it is none that can be read."""
    if not key_type(blob).endswith(SUFFIX):
        return None
    try:
        found = load_ssh_public_identity(f"{key_type(blob)} {base64.b64encode(blob).decode()}".encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, SSHCertificate) else None


def certified_key(blob: bytes) -> bytes:
    """The key that a certificate is about; a plain key, and what cannot be read, is returned as it is."""
    certificate = read_certificate(blob)
    return _key_blob(certificate.public_key()) if certificate is not None else blob


def signer(blob: bytes) -> bytes:
    """The key of the authority that signed a certificate; empty for what is none."""
    certificate = read_certificate(blob)
    try:
        return _key_blob(certificate.signature_key()) if certificate is not None else b""
    except (ValueError, UnsupportedAlgorithm):
        return b""


def objection(blob: bytes, name: str, authorities: Sequence[bytes]) -> str:
    """Why a certificate does not vouch for the host `name`, in words; empty when it does."""
    certificate = read_certificate(blob)
    if certificate is None:
        return "it cannot be read here"
    authority = signer(blob)
    if authority not in authorities:
        return f"it is signed by {fingerprint(authority)}, which is no @cert-authority for {name}"
    if not _is_signed(certificate, blob):
        return "its signature is wrong, or of SHA-1"
    if certificate.type is not SSHCertificateType.HOST:
        return "it is a user's, not a host's"
    names = [principal.decode(errors="replace") for principal in certificate.valid_principals]
    if not any(fits(pattern, name) for pattern in names):
        return f"it is for {one_line(', '.join(names))}, not for {name}" if names else "it names no host"
    if certificate.critical_options:
        return f"it demands {one_line(b', '.join(certificate.critical_options))}, which is unknown here"
    return out_of_date(certificate)


def out_of_date(certificate: SSHCertificate) -> str:
    """Since or until when a certificate does not count; empty when it counts now."""
    now = time.time()
    if now < certificate.valid_after:
        return f"it is not valid before {_date(certificate.valid_after)}; is this machine's clock right?"
    return f"it expired on {_date(certificate.valid_before)}" if now >= certificate.valid_before else ""


def _is_signed(certificate: SSHCertificate, blob: bytes) -> bool:
    try:
        certificate.verify_cert_signature()
        authority = certificate.signature_key()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    if not isinstance(authority, rsa.RSAPublicKey):
        return True
    # The last of a certificate: the name of the algorithm, a length, the signature itself.
    return not blob[: -(authority.key_size // 8 + 4)].endswith(b"\0\0\0\x07ssh-rsa")


def _key_blob(key: SSHCertPublicKeyTypes) -> bytes:
    return base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(min(seconds, 1 << 40)))
