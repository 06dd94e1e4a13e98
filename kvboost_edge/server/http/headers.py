"""The security headers, of the API's answers and of the page's."""

from __future__ import annotations

__all__ = ["PAGE_HEADERS", "SECURITY_HEADERS"]

# For every answer that sets none of its own.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# Scripts, styles, images and connections from this server only; no inline script or style, no frame
# around the page, and no string that becomes markup (trusted types without any policy).
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
