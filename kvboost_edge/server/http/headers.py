"""Security headers of API responses and the web page."""

from __future__ import annotations

__all__ = ["PAGE_HEADERS", "SECURITY_HEADERS"]

# Defaults for every response.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# Allow scripts, styles, images and connections of this server only. Forbid inline scripts and
# styles, framing, and the conversion of strings to markup (trusted types without a policy).
_PAGE_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "frame-src 'none'",
        "object-src 'none'",
        "worker-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

PAGE_HEADERS = {
    **SECURITY_HEADERS,
    "Content-Security-Policy": _PAGE_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
