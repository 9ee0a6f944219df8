"""The page that shows a report: JavaScript, CSS, the HTML writer, and the TensorBoard plugin.

It reads the JSON that a comparison writes, and nothing else of padiff.
"""

from padiff_page.html import page, page_parts

__all__ = ["page", "page_parts"]
