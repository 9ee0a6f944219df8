"""The page that shows a report: JavaScript, CSS, the HTML writer, and the TensorBoard plugin.

The page reads only the JSON of a comparison, and imports nothing else of padiff.
"""

from padiff_page.html import page, page_parts

__all__ = ["page", "page_parts"]
